"""The recall task: conversations that ask for codes, and the score of a server on them."""
