"""Messages between prefill and decode servers, and reads of pages."""
