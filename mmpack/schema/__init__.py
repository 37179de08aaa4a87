"""The batch schema: samples, media, spans, their rules, and trace files. numpy only."""
