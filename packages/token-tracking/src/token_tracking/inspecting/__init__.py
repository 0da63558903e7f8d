"""What was learnt from a template, shown to people."""
