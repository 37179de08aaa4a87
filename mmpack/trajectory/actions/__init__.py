"""Actions in what the policy wrote: formats, spans and kinds of loss; checks of annotated actions."""
