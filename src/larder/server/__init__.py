"""Multi-tenant inference server over one model, within one budget of bytes."""
