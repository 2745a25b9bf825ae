"""Operations: each has one specification in plain torch (`reference`); random numbers come from `counter`."""
