//! Where a story takes place: the clock, the tasks and the endpoints of all ranks.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::Error;
use crate::exec::{Driven, Progress, Runtime, Task};
use crate::testing::virtual_link::Timeline;
use crate::types::{Rank, mix};

/// While operations wait, deadlines are looked at this often.
const WATCH: Duration = Duration::from_millis(20);

/// All ranks of a story.
pub(super) struct Stage {
    begin: Instant,
    seed: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The virtual time since the story's beginning.
    now: Duration,
    draws: u64,
    /// The task to wake at each time; timers of the same time are in the order in which they were set. `None`: no task, but the endpoints get
    /// a turn then.
    timers: BTreeMap<(Duration, u64), Option<Waker>>,
    timers_set: u64,
    /// By id. `None`: the task has ended, or is being polled.
    tasks: Vec<Option<(Rank, Task)>>,
    /// The ids of tasks that were woken.
    ready: VecDeque<usize>,
    endpoints: Vec<(Rank, Arc<dyn Driven>)>,
    dead: Vec<Rank>,
    log: Vec<String>,
}

impl Stage {
    pub(super) fn new(seed: u64) -> Arc<Stage> {
        Arc::new(Stage { begin: Instant::now(), seed, state: Mutex::default() })
    }

    /// A number below `bound`, the next that follows from the seed.
    pub(super) fn draw(&self, bound: u64) -> u64 {
        let mut state = self.state.lock();
        state.draws += 1;
        mix(self.seed, state.draws) % bound
    }

    pub(super) fn runtime(self: &Arc<Self>, rank: Rank) -> Arc<dyn Runtime> {
        Arc::new(OfRank { stage: self.clone(), rank })
    }

    /// The rank's process ends here, in whatever it does: it is never given a turn again.
    pub(super) fn kill(&self, rank: Rank) {
        self.state.lock().dead.push(rank);
        self.log(format!("rank {rank} dies"));
    }

    /// What was told so far, each line with its time in virtual microseconds.
    pub(super) fn told(&self) -> Vec<String> {
        self.state.lock().log.clone()
    }

    pub(super) fn spawn(self: &Arc<Self>, rank: Rank, task: Task) {
        let mut state = self.state.lock();
        let id = state.tasks.len();
        state.tasks.push(Some((rank, task)));
        state.ready.push_back(id);
    }

    pub(super) fn sleep(self: &Arc<Self>, pause: Duration) -> Task {
        Box::pin(Sleep { stage: Arc::downgrade(self), pause, until: None })
    }

    /// Lets the story go on until `is_over`, but for at most `most` of virtual time. Returns whether it is over.
    pub(super) fn run(self: &Arc<Self>, most: Duration, is_over: impl Fn() -> bool) -> bool {
        let end = self.state.lock().now + most;
        loop {
            while self.run_a_task() {}
            if is_over() {
                return true;
            }
            if self.drive_all() || !self.state.lock().ready.is_empty() {
                continue;
            }
            let mut state = self.state.lock();
            let next = state.timers.keys().next().map(|(at, _)| *at);
            let look = (!state.endpoints.is_empty()).then(|| state.now + WATCH);
            let Some(at) = next.into_iter().chain(look).min().filter(|at| *at <= end) else { return false };
            state.now = state.now.max(at);
            let later = state.timers.split_off(&(at + Duration::from_nanos(1), 0));
            let due = std::mem::replace(&mut state.timers, later);
            drop(state);
            due.into_values().flatten().for_each(Waker::wake);
        }
    }

    /// Polls one of the woken tasks, chosen by the seed. Returns whether there was any.
    fn run_a_task(self: &Arc<Self>) -> bool {
        let ready = self.state.lock().ready.len();
        if ready == 0 {
            return false;
        }
        let place = self.draw(ready as u64) as usize;
        let mut state = self.state.lock();
        let Some(id) = state.ready.remove(place) else { return true };
        let taken = state.tasks[id].take();
        let Some((rank, mut task)) = taken else { return true };
        if state.dead.contains(&rank) {
            // What a dead process holds stays as it was.
            state.tasks[id] = Some((rank, task));
            return true;
        }
        drop(state);
        let waker = Waker::from(Arc::new(TaskWaker { stage: Arc::downgrade(self), id }));
        if task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            self.state.lock().tasks[id] = Some((rank, task));
        }
        true
    }

    /// Gives each rank's endpoint a turn, in an order that follows from the seed. Returns whether anything moved.
    fn drive_all(&self) -> bool {
        let mut list = self.state.lock().endpoints.clone();
        let mut moved = false;
        while !list.is_empty() {
            let (rank, endpoint) = list.swap_remove(self.draw(list.len() as u64) as usize);
            if self.state.lock().dead.contains(&rank) {
                continue;
            }
            match endpoint.clone().drive_and_check() {
                Progress::Advanced => moved = true,
                Progress::Blocked => {}
                Progress::Idle => {
                    self.state.lock().endpoints.retain(|(_, other)| !Arc::ptr_eq(other, &endpoint));
                    endpoint.enlisted().store(false, std::sync::atomic::Ordering::Release);
                }
            }
        }
        moved
    }
}

impl Timeline for Stage {
    fn now(&self) -> Instant {
        self.begin + self.state.lock().now
    }

    fn latency(&self) -> Duration {
        Duration::from_micros(5 + self.draw(40))
    }

    fn look_at(&self, at: Instant) {
        let mut state = self.state.lock();
        state.timers_set += 1;
        let key = (at - self.begin, state.timers_set);
        state.timers.insert(key, None);
    }

    fn log(&self, event: String) {
        let mut state = self.state.lock();
        let now = state.now.as_micros();
        state.log.push(format!("{now:>8} us  {event}"));
    }
}

struct TaskWaker {
    stage: Weak<Stage>,
    id: usize,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let Some(stage) = self.stage.upgrade() else { return };
        let mut state = stage.state.lock();
        if !state.ready.contains(&self.id) {
            state.ready.push_back(self.id);
        }
    }
}

struct Sleep {
    stage: Weak<Stage>,
    pause: Duration,
    /// Since the story's beginning; set when it is first polled.
    until: Option<Duration>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(stage) = self.stage.upgrade() else { return Poll::Pending };
        let mut state = stage.state.lock();
        let pause = self.pause;
        let until = *self.until.get_or_insert(state.now + pause);
        if state.now >= until {
            return Poll::Ready(());
        }
        state.timers_set += 1;
        let key = (until, state.timers_set);
        state.timers.insert(key, Some(cx.waker().clone()));
        Poll::Pending
    }
}

/// What a rank of the story has in place of its process's clock and threads.
struct OfRank {
    stage: Arc<Stage>,
    rank: Rank,
}

impl Runtime for OfRank {
    fn now(&self) -> Instant {
        Timeline::now(&*self.stage)
    }

    fn may_wait(&self) -> bool {
        false
    }

    fn enlist(&self, endpoint: Arc<dyn Driven>) {
        self.stage.state.lock().endpoints.push((self.rank, endpoint));
    }

    // Nothing needs to be done: every endpoint has its turn before time goes on.
    fn nudge(&self) {}

    fn kick(&self) {}

    fn waker(&self) -> &Waker {
        Waker::noop()
    }

    fn spawn(&self, task: Task) -> Result<(), Error> {
        self.stage.spawn(self.rank, task);
        Ok(())
    }

    fn sleep(&self, pause: Duration) -> Task {
        self.stage.sleep(pause)
    }
}
