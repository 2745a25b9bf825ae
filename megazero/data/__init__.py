"""Turn token files into batches: files, documents, the order of samples, batches.

dialects          which kind of token files a path names; joined: a folder of them, as one
token_dataset     what every kind offers
indexed_dataset   the .bin/.idx pair (Megatron's format), written atomically; index_file: its index, read and checked
datatrove, headerless   token files of other projects
data_file, document_offsets   what is read where it is needed, of files of any size
remembered        what was found out about huge files, kept for the next opening
choice, documents which documents are training and which validation; documents joined to one token stream
sampler           sample id -> window, index in the batch -> (data rank, micro-batch, row): pure functions
growth            the same for a source that grows
windows           windows of the stream as tensors
interleave        sample id -> source, and which of its samples: several sources by weight
mixture           one source, or several: sample id -> source and window
loader            one list of micro-batches per step
tokenizer         text <-> ids; tokenizers/: its kinds
origin            what token files were made of, PREFIX.json
"""
