"""What a machine has and how fast it is: each probe gives findings, and says in one line why it cannot."""
