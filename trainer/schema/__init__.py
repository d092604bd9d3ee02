"""What a config may say: sections, rules between them, and the words for faults."""
