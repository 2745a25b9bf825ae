"""Kinds of tokenizers, each with the same offer (`data/tokenizer.py`, which picks one by the name of the file).

common           what all of them share: limits, faults, the check whether a text comes back
sentence_piece   *.model, SentencePiece
json_file        tokenizer.json, of the tokenizers library (extra hf)
rank_file        *.tiktoken, byte pairs in the order in which they are merged (extra tiktoken)
plain_bytes      the 256 bytes, no file
"""
