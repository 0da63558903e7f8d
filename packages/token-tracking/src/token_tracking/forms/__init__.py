"""The samples of a conversation, in the forms that trainers take."""
