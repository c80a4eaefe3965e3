//! Strikes agents with faults.

use super::*;

impl World {
    pub(super) fn inject(&mut self, fault: Fault) {
        let target = match &fault {
            Fault::Kill(node)
            | Fault::PowerOff(node)
            | Fault::Stop(node)
            | Fault::Continue(node)
            | Fault::Signal(node)
            | Fault::Notice(node)
            | Fault::RankFails { node, .. } => Some(*node),
            _ => None,
        };
        // One that has not come yet cannot be struck.
        if target.is_some_and(|node| node >= self.nodes.len()) {
            return;
        }
        match fault {
            Fault::Arrive { host } => {
                let store = format!("s{}", self.nodes.len());
                self.arrive(host, store);
            }
            Fault::Return => self.arrive(0, "s0".to_owned()),
            Fault::StoreDown => {
                self.is_down = true;
                for node in 0..self.nodes.len() {
                    if let Some(store) = self.nodes[node].at.clone()
                        && self.nodes[node].island == 0
                    {
                        self.give(node, Input::Broken { store });
                    }
                }
            }
            Fault::StoreUp { empty } => {
                self.is_down = false;
                for store in self.stores.values_mut().filter(|_| empty) {
                    *store = Store::default();
                }
            }
            Fault::Leave { node, silent } => {
                let left =
                    |page: &Page| matches!(page.state, State::Left(_)) || silent.contains(&page.id);
                if let Some(store) = self.nodes[node].at.clone()
                    && self.access(node, &store) == Access::There
                    && let Some(place) = self.stores.get_mut(&store)
                    && place.host.is_none()
                    && place.pages.values().all(left)
                {
                    *place = Store::default();
                    // An agent that comes now begins another job of the same name.
                    self.started.clear();
                }
                self.inject(match self.address_goes {
                    true => Fault::PowerOff(node),
                    false => Fault::Kill(node),
                });
            }
            Fault::Kill(node) => {
                self.nodes[node].alive = false;
                self.nodes[node].ranks = None;
            }
            Fault::PowerOff(node) => {
                self.nodes[node].alive = false;
                self.nodes[node].powered = false;
                self.nodes[node].ranks = None;
            }
            Fault::Stop(node) => self.nodes[node].stopped = true,
            Fault::Continue(node) => {
                self.nodes[node].stopped = false;
                for input in std::mem::take(&mut self.nodes[node].missed) {
                    self.give(node, input);
                }
                self.give(node, Input::Tick);
            }
            Fault::CutOff(nodes) => {
                let island = 1 + self.dice.below(1_000_000) as usize;
                for node in nodes {
                    if let Some(node) = self.nodes.get_mut(node) {
                        node.island = island;
                    }
                }
            }
            Fault::Heal => {
                for node in &mut self.nodes {
                    node.island = 0;
                }
            }
            Fault::Signal(node) => self.give(node, Input::Signal(15)),
            Fault::Notice(node) if self.nodes[node].ranks.is_some() => {
                self.give(node, Input::Stop(NOTICE));
            }
            Fault::Notice(_) => {}
            Fault::RankFails {
                node,
                code,
                victims,
            } => self.fail_rank(node, code, victims),
        }
    }

    fn fail_rank(&mut self, node: usize, code: i32, victims: bool) {
        let Some(running) = &self.nodes[node].ranks else {
            return;
        };
        let (record, token) = (running.record.clone(), running.token);
        let Some(begun) = self.started.get(&record.id.number) else {
            return;
        };
        let begun: BTreeMap<usize, Duration> = begun.at.iter().copied().collect();
        let report = |world: &Self, node: usize, blames, later: Duration| {
            let at = record.position(world.nodes[node].agent.id()).unwrap_or(0);
            let begun = begun.get(&node).copied().unwrap_or(world.now);
            let ranks = world.nodes[node].ranks.as_ref();
            let slot = ranks.and_then(|ranks| ranks.slots.first()).copied();
            let local_rank = slot.unwrap_or(0);
            let failure = Failure {
                rank: record.members[at].first + local_rank,
                local_rank,
                pid: 1,
                blames,
                after: (world.now + later).saturating_sub(begun),
                node: Some(crate::report::Node {
                    rank: at,
                    host: world.nodes[node].host.clone(),
                }),
                ..Failure::example(FailureKind::ExitCode(code))
            };
            Box::new(Report {
                failure,
                at_us: (world.clock_of(node) + later).as_micros() as u64,
                is_later: false,
                recovers: world.rules.recovers_live,
            })
        };
        let first = report(self, node, None, Duration::ZERO);
        let culprit = first.failure.rank;
        self.handle(Event::RankFails(node, token, first));
        // The ranks of a job that recovers live wait for the next generation instead.
        if !victims || self.rules.recovers_live {
            return;
        }
        for other in 0..self.nodes.len() {
            let same = |ranks: &&Running| ranks.record.id == record.id;
            let Some(token) = self.nodes[other]
                .ranks
                .as_ref()
                .filter(same)
                .map(|r| r.token)
            else {
                continue;
            };
            if other != node && self.reaches(other, node) && self.dice.chance(60) {
                let later = ms(1 + self.dice.below(60));
                let blames = self.dice.chance(50).then_some(culprit);
                let report = report(self, other, blames, later);
                self.after(later, Event::RankFails(other, token, report));
            }
        }
    }

    fn arrive(&mut self, host: usize, store: String) {
        let node = self.nodes.len();
        let id = AgentId(1000 + node as u64);
        // Drawn from the number, so that schedules that are kept by their seed stay what they were.
        let ahead = Duration::from_micros(Dice(id.0).below(1_000_000_000_000));
        let is_outside = self.rules.outage.is_some();
        let (host_of_store, endpoint) = match is_outside {
            true => (None, "outside"),
            false => (Some(node), "s0"),
        };
        let (standby, store) = match is_outside {
            true => (String::new(), endpoint.to_owned()),
            false => (store.clone(), store),
        };
        let nproc = self.nproc.unwrap_or(1 + host % 3);
        let page = Page {
            host: format!("h{host}"),
            addr: format!("10.0.0.{node}"),
            standby,
            nproc,
            node_rank: self.rules.is_static.then_some(node),
            ..Page::new(id)
        };
        if !is_outside || !self.stores.contains_key(&store) {
            let place = Store {
                host: host_of_store,
                ..Store::default()
            };
            self.stores.insert(store, place);
        }
        self.nodes.push(Node {
            agent: Agent::new(self.rules.clone(), page, endpoint.into(), self.now + ahead),
            host: format!("h{host}"),
            nproc,
            ahead,
            alive: true,
            powered: true,
            stopped: false,
            island: 0,
            missed: Vec::new(),
            connection: 0,
            at: None,
            has_record: false,
            fifo: Duration::ZERO,
            look_fifo: Duration::ZERO,
            pending: BTreeSet::new(),
            wake: 0,
            ranks: None,
            joins: 0,
            exit: None,
            notices: Vec::new(),
        });
        self.give(node, Input::Tick);
    }
}
