"""Transfers between two processes over TCP on loopback."""
