"""What a video file holds, opened by PyAV and checked: streams, packets, clocks. Nothing here decodes pictures."""
