"""Records in the formats of the field, as a tokenizer of Hugging Face encodes them.

Read `data_set` first: what becomes of a record.
"""
