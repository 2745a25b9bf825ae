"""Commands that make and check token files: train_tokenizer, preprocess, inspect, merge.

Each runs as `python data_tools/NAME.py` and offers `main(argv) -> exit code` to other scripts. What they share:
command (options, errors, exit codes), corpus (reading text), encoding (text to ids in worker processes).
"""
