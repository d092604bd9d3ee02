"""Models, tokenizers, records and adapters of the Hugging Face libraries.

Read `library` first: it answers what the engine asks. `data_set` is what becomes of a record.
"""
