"""Real servers, their clients, and fakes of their other side."""
