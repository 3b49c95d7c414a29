"""Host pools of a whole model, and transfers of several pools together."""
