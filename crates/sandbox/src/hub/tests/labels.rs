//! Commands that clients find again: how they were started, and how long they stay.

use std::time::Duration;

use super::*;

async fn labelled(link: &Link, agent: &mut Agent, kept_ms: u64) -> (Channel, u32) {
    let Open::Exec(start) = exec() else {
        unreachable!("it is one")
    };
    let open = Open::DetachedAs {
        start,
        label: Some("mine".into()),
        kept_ms: Some(kept_ms),
    };
    let channel = link.open(open, WINDOW).unwrap();
    let number = agent.opened().await;
    let started = AgentMessage::Started {
        channel: number,
        pid: 7,
    };
    agent.say(&started).await;
    (channel, number)
}

async fn end(agent: &mut Agent, channel: u32) {
    for stream in [StreamId::Out, StreamId::Err] {
        let offset = 0;
        let eof = Frame::Eof {
            channel,
            stream,
            offset,
        };
        agent.send(eof).await;
    }
    let outcome = Outcome::Exited { code: 0 };
    agent.say(&AgentMessage::Ended { channel, outcome }).await;
}

#[tokio::test]
async fn a_command_that_has_ended_is_removed_when_no_client_reads_it() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut channel, number) = labelled(&link, &mut agent, 1).await;
    assert_eq!(channel.control.started().await.unwrap(), Ok(7));
    let listed = hub.execs().await;
    assert_eq!(listed[0].details.label.as_deref(), Some("mine"));
    assert!(listed[0].details.stdin && !listed[0].details.terminal);
    let config = listed[0].details.config.clone().unwrap();
    assert_eq!(config.argv, ["true"]);
    end(&mut agent, number).await;
    let gone = async {
        while !hub.execs().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, gone).await.expect("it is removed");
    let outcome = channel.control.ended().await.unwrap();
    assert_eq!(outcome, Outcome::Exited { code: 0 });
}

#[tokio::test]
async fn a_label_that_is_too_long_is_refused() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let Open::Exec(start) = exec() else {
        unreachable!("it is one")
    };
    let open = Open::DetachedAs {
        start,
        label: Some("x".repeat(257)),
        kept_ms: None,
    };
    let mut channel = link.open(open, WINDOW).unwrap();
    let started = channel.control.started().await.unwrap();
    assert!(
        matches!(started, Err(Outcome::NotStarted(_))),
        "{started:?}"
    );
    assert!(hub.execs().await.is_empty());
}
