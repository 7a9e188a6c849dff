"""What a store is asked for over time: one made-up crowd per file, the file its public name."""
