"""Machines of one server: its nodes, and hosts with networks of their own."""
