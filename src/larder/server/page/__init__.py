"""The page at `/`: chat, sessions, and what is kept of them."""
