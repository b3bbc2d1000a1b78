//! Which settings of a plan go together, and the shape of its slices. A plan may come from a file or
//! from another program: nothing else in the engine checks it again.

use crate::api::PlanError;
use crate::plan::{Cutoff, Plan, PullRule, Scheme, Strategy, Synchrony, TensorSpec, Update};
use alloc::format;

/// Most ranks of a ring: the header counts hops in 16 bits.
const RING_RANKS_MAX: u32 = 1 << 16;

impl Plan {
    /// Checks that strategy, update, roles and schemes go together, and that the slices of each
    /// tensor cover it.
    ///
    /// # Errors
    /// [`PlanError`] names the tensor or setting, and says what to use instead.
    pub fn validate(&self) -> Result<(), PlanError> {
        self.strategy.validate(self.update, self.workers())?;
        self.check_dedicated_servers()?;
        for tensor in &self.tensors {
            tensor.scheme.check(&tensor.spec, &self.strategy, self.update, self.workers())?;
        }
        self.check_slices()
    }

    /// Checks that dedicated servers go with the other rules.
    pub(crate) fn check_dedicated_servers(&self) -> Result<(), PlanError> {
        if self.dedicated_servers == 0 {
            return Ok(());
        }
        let refuse = |why: &str| {
            let count = self.dedicated_servers;
            Err(PlanError::new(format!("{count} of the ranks only serve, but {why}")))
        };
        if self.dedicated_servers >= self.world_size {
            return refuse("no rank is left that trains");
        }
        if self.strategy.synchrony != Synchrony::Bulk {
            return refuse(
                "only steps that wait for all ranks that train are served from apart: who is left \
                 out, or how old an update may be, is not known there",
            );
        }
        Ok(())
    }

    fn check_slices(&self) -> Result<(), PlanError> {
        let mut next_slice = 0;
        for (index, tensor) in self.tensors.iter().enumerate() {
            let (name, slices) = (&tensor.spec.name, tensor.slices.clone());
            let own = self.slices.get(slices.start as usize..slices.end as usize);
            let Some(own) = own.filter(|_| slices.start == next_slice) else {
                return Err(PlanError::new(format!("tensor {name:?} has slices {slices:?}")));
            };
            next_slice = slices.end;
            let mut elements = 0_u64;
            for slice in own {
                let fits = slice.tensor.index() == index
                    && slice.start == elements
                    && slice.owner.0 < self.world_size
                    && (tensor.scheme == Scheme::Ps || self.trains(slice.owner));
                if !fits {
                    let what = format!("tensor {name:?} has a slice that is not its own");
                    return Err(PlanError::new(what));
                }
                elements = elements.saturating_add(slice.length);
            }
            if elements != tensor.spec.numel || slices.is_empty() {
                let what = format!("the slices of tensor {name:?} do not cover it");
                return Err(PlanError::new(what));
            }
        }
        if next_slice as usize != self.slices.len() {
            return Err(PlanError::new("there are slices of no tensor"));
        }
        Ok(())
    }
}

impl Strategy {
    /// Checks that the strategy's synchrony goes with its pull rule, with the place of updates and
    /// with the number of ranks that train.
    ///
    /// # Errors
    /// [`PlanError`] says why not, and what to use instead.
    pub fn validate(&self, update: Update, workers: u32) -> Result<(), PlanError> {
        let name = &self.name;
        match self.synchrony {
            Synchrony::BackupWorkers(_) if update != Update::Worker => {
                return Err(PlanError::new(
                    "stragglers are left out, but with update=server an owner updates its own \
                     parameters, and one that is late itself does not hold them yet: use \
                     update=worker",
                ));
            }
            Synchrony::BackupWorkers(_) if self.pull != PullRule::Broadcast => {
                return Err(PlanError::new(format!(
                    "stragglers are left out, but in strategy {name:?} each worker pulls results, \
                     and a late one would ask for old ones: use p3, slicing or wfbp"
                )));
            }
            Synchrony::Async if update != Update::Server => {
                return Err(PlanError::new(format!(
                    "strategy {name:?} applies each rank's gradients alone, where the parameters \
                     are: it asks for update=server; with update=worker every rank would train a \
                     model of its own"
                )));
            }
            Synchrony::Async if self.pull != PullRule::Broadcast => {
                return Err(PlanError::new(format!(
                    "strategy {name:?} answers each push at once: it has no use for a pull rule"
                )));
            }
            _ => {}
        }
        self.check_straggler_policy(workers)
    }

    fn check_straggler_policy(&self, workers: u32) -> Result<(), PlanError> {
        let Some(policy) = self.synchrony.stragglers() else {
            return Ok(());
        };
        let problem = match policy.cutoff {
            _ if policy.ahead_steps == 0 => {
                "ahead_steps is 0: at least one step is decided ahead".into()
            }
            Cutoff::Backup { ranks: 0 } => "backup is 0: no rank is left out".into(),
            Cutoff::Backup { ranks } if ranks >= workers => {
                format!("backup is {ranks} of {workers} ranks: at least one has to contribute")
            }
            Cutoff::Deadline { percent } if percent <= 100 => {
                format!("the deadline is {percent}% of a step: it must be over 100%")
            }
            _ => return Ok(()),
        };
        Err(PlanError::new(problem))
    }
}

impl Scheme {
    /// Whether a tensor of this scheme may be part of a plan with these rules.
    ///
    /// # Errors
    /// When the engine cannot do that; the text says why, and what to use instead.
    pub(crate) fn check(
        self,
        spec: &TensorSpec,
        strategy: &Strategy,
        update: Update,
        world_size: u32,
    ) -> Result<(), PlanError> {
        if self == Scheme::Ps {
            return Ok(());
        }
        let (name, scheme) = (&spec.name, self.name());
        let refuse = |why: &str| {
            Err(PlanError::new(format!("tensor {name:?} has scheme {scheme}, but {why}")))
        };
        if self.has_blocks() && spec.numel * spec.dtype.bytes() > u64::from(u32::MAX) {
            return refuse("blocks are below 4 GiB: split the tensor");
        }
        if update == Update::Server {
            return refuse(
                "update=server keeps optimizer state on the server that owns a slice, and this \
                 scheme has no servers: use update=worker, or scheme ps",
            );
        }
        if strategy.pull != PullRule::Broadcast {
            let strategy = &strategy.name;
            return refuse(&format!(
                "in strategy {strategy:?} workers pull results from servers, and this scheme has \
                 no servers: use p3, slicing or wfbp, or scheme ps"
            ));
        }
        if strategy.synchrony != Synchrony::Bulk {
            return refuse(
                "it needs the contributions of all ranks: use synchronous training without stragglers, or scheme ps",
            );
        }
        if self == Scheme::Ring && world_size > RING_RANKS_MAX {
            return refuse(&format!("a ring has at most {RING_RANKS_MAX} ranks: use scheme ps"));
        }
        Ok(())
    }
}
