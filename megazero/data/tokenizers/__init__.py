"""Kinds of tokenizers with the same interface (`data/tokenizer.py` picks one by the name of the file).

common           the part that all of them share: limits, errors, the round-trip check of a text
sentence_piece   *.model, SentencePiece
json_file        tokenizer.json, of the tokenizers library (extra hf)
rank_file        *.tiktoken, byte pairs in the order of their merges (extra tiktoken)
plain_bytes      the 256 bytes, no file
"""
