"""Turn token files into batches: files, documents, the order of samples, batches.

indexed_dataset   the .bin/.idx pair on disk (Megatron's format), read where it is needed, written atomically
documents         which documents are training and which validation; documents joined to one token stream
sampler           sample id -> window, index in the batch -> (data rank, micro-batch, row): pure functions
loader            windows of the stream as tensors, one list of micro-batches per step
tokenizer         text <-> ids; tokenizers/: its kinds
origin            what token files were made of, PREFIX.json
"""
