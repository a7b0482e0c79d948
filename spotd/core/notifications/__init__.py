"""What a person is notified of, and when: pure rules over events, conditions and the queue of one channel."""
