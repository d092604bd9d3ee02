"""Save the state of a run, and bring it back bit for bit.

`state` turns model, optimizer and generators into named tensors and JSON and back; `tensor_files`
puts the rows that a rank stores into safetensors files; `store` makes a checkpoint of them that is
there as a whole or not at all. Read `store` first.
"""
