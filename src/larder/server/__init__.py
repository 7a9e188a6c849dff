"""What answers many clients at once over one model, within one budget of bytes."""
