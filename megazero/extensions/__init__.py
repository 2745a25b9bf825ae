"""Extensions of ZeRO: each replaces a part of `zero`; only the registry imports them."""
