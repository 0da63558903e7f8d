"""How a chat template is learnt: probed with sentinel messages, compiled to a delta program, proven."""
