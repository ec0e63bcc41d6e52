"""A stand-in for the preloaded library."""


class FakeLibrary:
    """Counts what the clock tells it; offers nothing."""

    def __init__(self):
        self.steps = self.epochs = 0
        self.phases = []
        self.now = 0
        self.answers = {}
        self.remarks = []
        self.offered = []

    def mode(self):
        return 3

    def start(self, mode, options=None):
        return 0

    def step(self):
        self.steps += 1
        return len(self.offered)

    def finish(self):
        pass

    def request_opens(self):
        return self.steps

    def request_closes(self, number):
        pass

    def epoch(self):
        self.epochs += 1
        return 0

    def phase_of(self, name):
        return 5

    def phase(self, phase):
        before, self.now = self.now, phase
        self.phases.append(phase)
        return before

    def collecting(self, on):
        return 0

    def remark(self, remark):
        self.remarks.append(remark)
        return 0

    def candidates(self):
        offered, self.offered = self.offered, []
        return offered

    def explain(self, identity, answer):
        self.answers[identity] = answer
        return 0
