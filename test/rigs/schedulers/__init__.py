"""Whole schedulers in this process, on one rank or several, and random work for them."""
