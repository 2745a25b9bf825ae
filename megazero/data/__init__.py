"""Turn token files into batches: files, documents, the order of samples, batches.

token_dataset     the interface of token files for all their users
indexed_dataset   the .bin/.idx pair (Megatron's format), written atomically; index_file: its index, read and checked
joined            a folder of pairs, as one
data_file         a file of any size, read in pieces
choice, documents which documents are training and which validation; documents joined to one token stream
sampler           sample id -> window, index in the batch -> (data rank, micro-batch, row): pure functions
windows           windows of the stream as tensors
interleave        sample id -> source, and which of its samples: several sources by weight
mixture           one source, or several: sample id -> source and window
loader            one list of micro-batches per step
tokenizer         text <-> ids; tokenizers/: its kinds
origin            what token files were made of, PREFIX.json
"""
