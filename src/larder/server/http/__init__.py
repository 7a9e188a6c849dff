"""The server as HTTP: what clients send and what they are sent back."""
