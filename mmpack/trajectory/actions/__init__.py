"""Actions in what the policy wrote: formats, spans and kinds of loss, and the check of those that are written down."""
