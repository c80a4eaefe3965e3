//! The manifests as kubectl reads them: it is written in Go, whose YAML is another than ours.

#[path = "support/odd.rs"]
mod odd;

use std::io::Write;
use std::process::{Command, Stdio};

use odd::ODD;
use paceline_rendezvous::token::{TOKEN_VARIABLE, Token};
use paceline_submit::{Submission, kubernetes};
use serde_json::{Deserializer, Value};

/// What kubectl makes of the text, without a cluster; nothing where there is no kubectl.
fn read_by_kubectl(text: &str) -> Option<Vec<Value>> {
    let mut command = Command::new("kubectl");
    command.args([
        "annotate",
        "--local",
        "--output=json",
        "-f",
        "-",
        "read=yes",
    ]);
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            paceline_testing::skipped(format!(
                "kubectl cannot be run ({error}): apt-get install kubernetes-client"
            ));
            return None;
        }
    };
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(text.as_bytes()).expect("kubectl reads");
    drop(stdin);
    let output = child.wait_with_output().expect("kubectl ends");
    assert!(output.status.success(), "kubectl refuses:\n{text}");
    let objects = Deserializer::from_slice(&output.stdout).into_iter();
    Some(objects.collect::<Result<_, _>>().expect("JSON"))
}

#[test]
fn kubectl_reads_every_word_and_the_token_as_they_were_written() {
    let mut job = Submission::new("train", "./prog");
    job.args = ODD.map(str::to_owned).into();
    job.env = vec![("ODD".to_owned(), ODD.concat())];
    // All digits and one `e`, which is a number to a parser that is not told otherwise.
    let token =
        Token::from_hex(&format!("{}e{}", "1".repeat(31), "2".repeat(32))).expect("a token");
    let options = kubernetes::Options::new("image:1");
    let text = kubernetes::render(&job, &options, Some(&token)).expect("text");
    let Some(read) = read_by_kubectl(&text) else {
        return;
    };
    let kind = |kind: &str| {
        read.iter()
            .find(|object| object["kind"] == kind)
            .expect("a kind")
    };
    assert_eq!(kind("Secret")["stringData"][TOKEN_VARIABLE], token.to_hex());
    assert_eq!(kind("Service")["spec"]["clusterIP"], "None");
    let container = &kind("Job")["spec"]["template"]["spec"]["containers"][0];
    let args = container["args"].as_array().expect("words");
    assert_eq!(args[args.len() - ODD.len()..], ODD);
    assert_eq!(container["env"][2]["value"], ODD.concat());
}
