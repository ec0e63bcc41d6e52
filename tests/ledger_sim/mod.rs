//! A simulated training job that drives accounts, clock and judge as a real one would.
#![allow(dead_code)]

use strandline::ledger::{Accounts, Answer, Class, Clock, Frame, Holder, Judge, Phase, Sample, Symbols, Tag};
use strandline::report::{DevicePart, DeviceView, Report, Run, assemble};

/// splitmix64: small and good enough to vary a program.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub fn chance(&mut self, p: f64) -> bool {
        ((self.next() >> 11) as f64) < p * (1u64 << 53) as f64
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub tag: Tag,
    pub size: u64,
}

/// A job on one device. Sites are named by stack number.
pub struct Job {
    pub accounts: Accounts,
    pub clock: Clock,
    pub judge: Judge,
    pub rng: Rng,
    pub sample: Sample,
    /// Answers a candidate of the stack; None: nobody listens.
    pub python: Option<Box<dyn Fn(u32) -> Answer>>,
    /// (stack, class, step) of everything called, in the order of the calls.
    pub called: Vec<(u32, Class, u32)>,
    time: u64,
    params: Vec<Block>,
    grads: Vec<Block>,
    state: Vec<Block>,
    locals: Vec<Block>,
    /// Number of layers, and the bytes of a layer's weights.
    pub layers: u32,
    pub weight: u64,
    /// Added to the stacks of a training step: another loop of the program.
    pub stage: u32,
}

pub const PARAMS: u32 = 100;
pub const FORWARD: u32 = 200;
pub const BACKWARD: u32 = 300;
pub const GRADS: u32 = 400;
pub const STATE: u32 = 500;
pub const LOGITS: u32 = 600;
pub const LOSS: u32 = 601;
pub const BATCH: u32 = 602;

impl Job {
    pub fn new(seed: u64) -> Job {
        let mut job = Job {
            accounts: Accounts::new(0),
            clock: Clock::new(),
            judge: Judge::new(),
            rng: Rng(seed),
            sample: Sample { total: Some(80 << 30), ..Sample::default() },
            python: None,
            called: Vec::new(),
            time: 0,
            params: Vec::new(),
            grads: Vec::new(),
            state: Vec::new(),
            locals: Vec::new(),
            stage: 0,
            layers: 6,
            weight: 1 << 20,
        };
        for _ in 0..job.layers {
            let block = job.alloc(PARAMS, job.weight);
            job.params.push(block);
        }
        job
    }

    pub fn alloc(&mut self, stack: u32, size: u64) -> Block {
        let of_the_stage = (FORWARD..=BATCH).contains(&stack);
        let stack = if of_the_stage { stack + self.stage } else { stack };
        Block { tag: self.accounts.born(stack, size, self.clock.now()), size }
    }

    pub fn free(&mut self, block: Block) {
        self.accounts.died(block.tag, block.size, self.clock.now());
    }

    pub fn leak(&mut self, stack: u32, size: u64) {
        self.alloc(stack, size);
    }

    /// Forward, backward and optimizer with activations of `size` bytes per layer; ends the step.
    pub fn train(&mut self, size: u64) {
        self.forward_backward(size);
        self.optimizer();
        self.step();
    }

    pub fn forward_backward(&mut self, size: u64) {
        self.clock.enter(Phase::Forward);
        let old = std::mem::take(&mut self.locals);
        let batch = self.alloc(BATCH, size / 2 + 512);
        self.locals.push(batch);
        let mut live = Vec::new();
        for layer in 0..self.layers {
            live.push(self.alloc(FORWARD + layer, size));
        }
        let logits = self.alloc(LOGITS, size / 4 + 512);
        let loss = self.alloc(LOSS, 512);
        self.locals.extend([logits, loss]);
        for block in old {
            self.free(block);
        }
        for block in std::mem::take(&mut self.grads) {
            self.free(block);
        }
        self.clock.enter(Phase::Backward);
        for layer in (0..self.layers).rev() {
            let temporary = self.alloc(BACKWARD + layer, size);
            let grad = self.alloc(GRADS + layer, self.weight);
            self.grads.push(grad);
            self.free(temporary);
            if let Some(block) = live.pop() {
                self.free(block);
            }
        }
    }

    pub fn optimizer(&mut self) {
        self.clock.enter(Phase::Optimizer);
        if self.state.is_empty() {
            for _ in 0..self.layers * 2 {
                let block = self.alloc(STATE, self.weight);
                self.state.push(block);
            }
        }
        for _ in 0..self.layers {
            let temporary = self.alloc(STATE + 1, self.weight);
            self.free(temporary);
        }
        self.clock.enter(Phase::Other);
    }

    pub fn step(&mut self) {
        self.time += 100_000_000;
        let ended = self.clock.end_step(self.time);
        self.sample.allocated = self.accounts.live_bytes();
        self.sample.active = self.sample.allocated;
        self.sample.reserved = self.sample.reserved.max(self.sample.allocated);
        self.accounts.boundary(ended, self.clock.now().epoch, &self.sample);
        let waiting = self.judge.look(&mut self.accounts, &self.clock);
        if let (true, Some(python)) = (waiting > 0, &self.python) {
            for case in self.judge.take_candidates() {
                self.judge.explain(case.id, python(case.stack));
            }
        }
        self.note_called();
    }

    fn note_called(&mut self) {
        for finding in self.judge.take_new_findings() {
            let stack = finding.cases.first().map_or(0, |&at| self.judge.cases()[at].stack);
            self.called.push((stack, finding.class, finding.called_at_step));
        }
    }

    /// Ends the job as Python does: locals go, then the judge finishes.
    pub fn end(&mut self, locals: Vec<Block>) -> Vec<Open> {
        for block in locals.into_iter().chain(std::mem::take(&mut self.locals)) {
            self.free(block);
        }
        self.judge.finish();
        self.note_called();
        self.accounts.check();
        self.open()
    }

    /// The findings that stand.
    pub fn open(&self) -> Vec<Open> {
        self.judge
            .findings()
            .iter()
            .filter(|finding| finding.is_open())
            .map(|finding| Open {
                class: finding.class,
                stacks: finding.cases.iter().map(|&at| self.judge.cases()[at].stack).collect(),
                called_at: finding.called_at_step,
            })
            .collect()
    }

    pub fn report(&self) -> Report {
        let view = DeviceView::of(&self.accounts, &self.judge.wanted(0));
        let parts = vec![DevicePart { view, stats: serde_json::Map::new() }];
        let run = Run {
            command: vec!["python".into(), "train.py".into()],
            pid: 4711,
            world_size: 1,
            mode: "heap".into(),
            ..Run::default()
        };
        assemble(run, parts, &self.judge, &self.clock, &Lines)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Open {
    pub class: Class,
    pub stacks: Vec<u32>,
    pub called_at: u32,
}

/// Stack N is line N of train.py.
pub struct Lines;

impl Symbols for Lines {
    fn frames(&self, stack: u32) -> Vec<Frame> {
        let frame = |line: u32, function: &str, user| Frame {
            file: if user { "/home/u/train.py".into() } else { "/usr/lib/torch/nn.py".into() },
            line,
            function: function.into(),
            kind: "python".into(),
            user,
        };
        vec![frame(1, "empty", false), frame(stack, "forward", true), frame(42, "train_step", true)]
    }
}

/// An answer that names a holder.
pub fn held(path: &str, line: u32) -> Answer {
    Answer {
        held_by: Some(Holder { path: path.into(), kind: "list".into() }),
        kept_at: Some(strandline::ledger::Kept {
            file: "train.py".into(),
            line,
            code: "kept.append(x)".into(),
        }),
        fix: Some("append a number".into()),
        released_by: Some("nothing".into()),
        group: Some(path.into()),
        ..Answer::default()
    }
}

pub fn innocent(reason: &str) -> Answer {
    Answer { not_a_leak: Some(reason.into()), ..Answer::default() }
}
