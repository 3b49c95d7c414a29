"""Host pools: pools of L2 by kind, layouts, memory, and copies of their pages."""
