"""The process of a rank: its construction, its loop, its sockets, its end."""
