"""The detokenizer process: ids to text."""
