//! `sandtree-bench server`: what HTTP adds to the library, and what the server itself needs.
//!
//! Both sides use keepers: the server's sandboxes and the library's are run by the same program.

mod client;

use std::time::{Duration, Instant};

use hyper::body::Bytes;
use sandtree::keeper::KeeperProgram;
use sandtree::{
    Error, ExecSpec, FileOwner, ForkSpec, Guest, Host, HostConfig, KeyLimits, Lifetime, Network,
    Result, RunIn, Sandbox, SandboxSpec, Scope,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::client::{Client, Server};
use crate::cli::Cli;
use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, ms};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::process;
use crate::samples::Samples;
use crate::turn::Turn;

#[derive(Debug, clap::Args)]
pub struct ServerArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
}

/// What HTTP may add to an operation.
const OVERHEAD_MS: f64 = 2.0;
/// Short operations are measured more often.
const SHORT_TIMES: usize = 10;
const FILE_BYTES: usize = 64 * 1024;
const STREAM_MB: u64 = 32;
const REQUESTS: usize = 500;
const CONNECTIONS: usize = 4;
/// How long the server keeps a command that has ended.
const KEPT_FOR: Duration = Duration::from_secs(30);
/// Background work after a start ends within this time.
const SETTLED: Duration = Duration::from_secs(1);

pub async fn run(global: &Global, args: ServerArgs) -> Outcome {
    let figures = measured(global, async |crew| {
        let cli = Cli::find(global)?;
        let key =
            crew.host
                .create_key("sandtree-bench", &[Scope::Sandboxes], KeyLimits::default())?;
        let measured = measure(global, crew, &cli, (&key.key, args.rounds.max(1))).await;
        crew.host.remove_key(&key.info.id)?;
        measured
    })
    .await?;
    Ok(figures.into())
}

async fn measure(
    global: &Global,
    crew: &Crew,
    cli: &Cli,
    (key, rounds): (&str, usize),
) -> Result<Vec<Figure>> {
    let server = Server::start(cli, key).await?;
    tokio::time::sleep(SETTLED).await;
    let memory = process::pss_bytes(server.pid()?)? as f64 / 1e6;
    let idle = Figure::new("PSS of an idle server", memory, "MB").at_most(25.0);
    let mut client = server.client().await?;
    let created = create(crew, &mut client).await?.1;
    let id = created["sandboxID"].as_str().unwrap_or_default().to_owned();
    let bench = Bench {
        crew,
        library: library(global).await?,
        sandbox: crew.host.sandbox(&id)?,
        server,
        created,
        rounds,
    };
    let mut figures = vec![idle];
    figures.push(bench.creations(&mut client).await?);
    figures.push(bench.commands().await?);
    figures.push(bench.files().await?);
    figures.push(bench.forks(&mut client).await?);
    figures.push(bench.output(cli).await?);
    figures.push(bench.download(cli).await?);
    figures.push(bench.requests().await?);
    Ok(figures.into_iter().map(Figure::through_http).collect())
}

/// The library as the server uses it: each sandbox in a keeper.
async fn library(global: &Global) -> Result<Host> {
    let keeper = KeeperProgram {
        path: global.sandtree()?,
        args: vec!["keeper".into()],
    };
    let config = HostConfig {
        run_in: RunIn::Keeper(keeper),
        ..global.config()?
    };
    Host::open(config).await
}

/// Creates a sandbox over HTTP, which the crew removes.
async fn create(crew: &Crew, client: &mut Client) -> Result<(Duration, Value)> {
    let asked = json!({ "templateID": IMAGE, "timeout": 3600 });
    let began = Instant::now();
    let created = client.post("/v2/sandboxes", &asked).await?;
    let took = began.elapsed();
    crew.adopt(created["sandboxID"].as_str().unwrap_or_default())?;
    Ok((took, created))
}

struct Bench<'a> {
    crew: &'a Crew,
    library: Host,
    server: Server,
    /// A sandbox that both sides use.
    sandbox: Sandbox,
    /// What the server answered when it created it.
    created: Value,
    rounds: usize,
}

impl Bench<'_> {
    async fn creations(&self, client: &mut Client) -> Result<Figure> {
        let mut pairs = Pairs::default();
        for round in 0..self.rounds {
            let http = async { Ok::<_, Error>(create(self.crew, client).await?.0) };
            let library = async {
                let began = Instant::now();
                let spec = SandboxSpec {
                    network: Some(Network::Full),
                    ..SandboxSpec::new(IMAGE)
                };
                self.crew.create_on(&self.library, spec).await?;
                Ok(began.elapsed())
            };
            pairs.push(Turn::of(round).both(http, library).await?);
            self.crew.clear_except(&self.sandbox).await?;
        }
        Ok(pairs.overhead("create"))
    }

    async fn commands(&self) -> Result<Figure> {
        let guest = self.library.sandbox(self.sandbox.id())?.guest().await?;
        let mut client = self.client().await?;
        let mut pairs = Pairs::default();
        for round in 0..self.rounds * SHORT_TIMES {
            let http = timed(async { client.run(&["/bin/true"]).await.map(drop) });
            let both = Turn::of(round).both(http, timed(true_detached(&guest)));
            pairs.push(both.await?);
        }
        Ok(pairs.overhead("command"))
    }

    async fn files(&self) -> Result<Figure> {
        let guest = self.library.sandbox(self.sandbox.id())?.guest().await?;
        let mut client = self.client().await?;
        let bytes = Bytes::from(vec![b'x'; FILE_BYTES]);
        let path = "/files?path=/dev/shm/over-http";
        let mut pairs = Pairs::default();
        for round in 0..self.rounds * SHORT_TIMES {
            let http = timed(async {
                client.put(path, bytes.clone()).await?;
                let read = client.get(path).await?;
                same(read.len())
            });
            let library = timed(async {
                let files = guest.files();
                let mut source = &bytes[..];
                let to = "/dev/shm/library";
                files.write(to, &mut source, FileOwner::default()).await?;
                same(files.read_to_vec(to, FILE_BYTES).await?.len())
            });
            pairs.push(Turn::of(round).both(http, library).await?);
        }
        Ok(pairs.overhead("64 KiB file written and read"))
    }

    async fn forks(&self, client: &mut Client) -> Result<Figure> {
        let source = self.library.sandbox(self.sandbox.id())?;
        let path = format!("/sandboxes/{}/fork", self.sandbox.id());
        let mut pairs = Pairs::default();
        for round in 0..self.rounds {
            let http = async {
                let began = Instant::now();
                let made = client.post(&path, &json!({ "timeout": 600 })).await?;
                let took = began.elapsed();
                let id = made[0]["sandbox"]["sandboxID"].as_str();
                self.crew.adopt(id.unwrap_or_default())?;
                Ok::<_, Error>(took)
            };
            let library = async {
                let began = Instant::now();
                let (copies, _) = source.fork(ForkSpec::new(1)).await?;
                let took = began.elapsed();
                self.crew.adopt(copies[0].id())?;
                Ok(took)
            };
            pairs.push(Turn::of(round).both(http, library).await?);
            self.crew.clear_except(&self.sandbox).await?;
        }
        Ok(pairs.overhead("fork"))
    }

    async fn output(&self, cli: &Cli) -> Result<Figure> {
        let count = format!("count={STREAM_MB}");
        let dd = ["dd", "if=/dev/zero", "bs=1M", &count];
        let mut client = self.client().await?;
        let mut words = vec!["exec", self.sandbox.id(), "--"];
        words.extend(dd);
        let mut pairs = Pairs::default();
        for round in 0..self.rounds {
            let http = timed(async { client.run(&dd).await.map(drop) });
            let program = timed(async { cli.run(&words).await.map(drop) });
            pairs.push(Turn::of(round).both(http, program).await?);
        }
        Ok(pairs.rate("stdout over HTTP", "sandtree exec"))
    }

    async fn download(&self, cli: &Cli) -> Result<Figure> {
        let file = "/dev/shm/large";
        let count = format!("count={STREAM_MB}");
        let of = format!("of={file}");
        let mut client = self.client().await?;
        client
            .run(&["dd", "if=/dev/zero", &of, "bs=1M", &count])
            .await?;
        let from = format!("{}:{file}", self.sandbox.id());
        let path = format!("/files?path={file}");
        let mut pairs = Pairs::default();
        for round in 0..self.rounds {
            let http = timed(async { client.get(&path).await.map(drop) });
            let program = timed(async { cli.run(&["cp", &from, "-"]).await.map(drop) });
            pairs.push(Turn::of(round).both(http, program).await?);
        }
        client.run(&["rm", file]).await?;
        Ok(pairs.rate("download over HTTP", "sandtree cp"))
    }

    /// How often a second the server tells about a sandbox, on a few connections.
    async fn requests(&self) -> Result<Figure> {
        let path = format!("/sandboxes/{}", self.sandbox.id());
        let mut rates = Vec::new();
        for _ in 0..self.rounds {
            let mut asking = JoinSet::new();
            let began = Instant::now();
            for _ in 0..CONNECTIONS {
                let mut client = self.server.client().await?;
                let path = path.clone();
                asking.spawn(async move {
                    for _ in 0..REQUESTS {
                        client.get(&path).await?;
                    }
                    Ok::<_, Error>(())
                });
            }
            while let Some(asked) = asking.join_next().await {
                asked.expect("asking does not panic")?;
            }
            let all = (CONNECTIONS * REQUESTS) as f64;
            rates.push(all / began.elapsed().as_secs_f64());
        }
        Ok(Figure::new("GET /sandboxes/{id}", rates, "requests/s"))
    }

    /// A client of the sandbox that both sides use.
    async fn client(&self) -> Result<Client> {
        Ok(self.server.client().await?.for_sandbox(&self.created))
    }
}

fn same(bytes: usize) -> Result<()> {
    if bytes == FILE_BYTES {
        return Ok(());
    }
    Err(Error::invalid("file", bytes, "as long as what was written"))
}

/// The command that the server starts for a client: it outlives its client.
async fn true_detached(guest: &Guest) -> Result<()> {
    let mut spec = ExecSpec::argv(["/bin/true"]);
    spec.lifetime = Lifetime::Detached;
    spec.kept = Some(KEPT_FOR);
    guest.exec(spec).await?.wait().await.map(drop)
}

async fn timed(work: impl Future<Output = Result<()>>) -> Result<Duration> {
    let began = Instant::now();
    work.await?;
    Ok(began.elapsed())
}

/// How long the same work takes over HTTP and without, in milliseconds.
#[derive(Debug, Default)]
struct Pairs {
    http: Vec<f64>,
    other: Vec<f64>,
}

impl Pairs {
    fn push(&mut self, (http, other): (Duration, Duration)) {
        self.http.push(ms(http));
        self.other.push(ms(other));
    }

    /// What HTTP adds: the difference in each round.
    fn overhead(self, what: &str) -> Figure {
        let both = self.http.iter().zip(&self.other);
        let added: Vec<f64> = both.map(|(http, other)| http - other).collect();
        let http = Samples::from(self.http).median();
        let other = Samples::from(self.other).median();
        let note = format!("{http:.2} ms over HTTP, {other:.2} ms through the library");
        Figure::ms(format!("added by HTTP: {what}"), added)
            .at_most(OVERHEAD_MS)
            .note(note)
    }

    fn rate(self, what: &str, peer: &str) -> Figure {
        let megabytes = (STREAM_MB << 20) as f64 / 1e6;
        let rate = |times: Vec<f64>| Samples::from(times).map(|ms| megabytes / ms * 1e3);
        Figure::new(what, rate(self.http), "MB/s")
            .times(peer, rate(self.other))
            .ratio_at_least(0.8)
    }
}
