"""Connections of control messages: frames over TCP, and the secret that both ends prove."""
