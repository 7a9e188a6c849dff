"""Every figure that `larder plot` draws, one file for each."""
