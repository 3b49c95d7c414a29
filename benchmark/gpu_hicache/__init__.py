"""HiCache on a GPU: cost without hits, benefit for conversations, copies between L1 and L2."""
