"""The log: the only package that touches aiokafka and broker processes.

    writer.py    events in, acknowledged            reader.py    records out, without a group
    stage.py     a StageCore as a FastStream app    topics.py    topics from the one table
    brokers.py   embedded · kafka-home · external   clients.py   delivery settings, in one place

What the embedded broker cannot do (end offsets, size limits, InitProducerId v0) is hidden here.
"""
