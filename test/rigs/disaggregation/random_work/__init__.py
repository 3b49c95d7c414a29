"""Parts of the random PD driver."""
