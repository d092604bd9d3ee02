"""Average the weights over steps; read `evaluate.py`."""
