#!/bin/sh
# An agent as a shell script with curl and jq: the policy names a number, is told whether it is right, and may try three
# times. The script gives the reward itself: 1 for the first guess, less for later ones.
#
# rollout:
#   agent: {command: [/path/to/guess.sh], renderer: qwen3}
set -eu

post() { # post PATH: sends the standard input to the session
    curl --silent --show-error --fail --data-binary @- \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
        "$MILLRACE_SESSION_URL$1"
}

number=$(printf '%s' "$MILLRACE_PROMPT" | jq --raw-output '.ground_truth')
messages=$(printf '%s' "$MILLRACE_PROMPT" | jq --compact-output '.prompt')
for reward in 1 0.5 0.25; do
    message=$(jq --null-input --argjson messages "$messages" '{messages: $messages, max_tokens: 16}' |
        post /v1/chat/completions | jq --compact-output '.choices[0].message')
    if [ "$(printf '%s' "$message" | jq --raw-output '.content')" = "$number" ]; then
        jq --null-input --argjson reward "$reward" '{reward: $reward}' | post /end
        exit
    fi
    messages=$(jq --null-input --compact-output --argjson messages "$messages" --argjson message "$message" \
        '$messages + [$message, {role: "user", content: "No. Try again."}]')
done
jq --null-input '{reward: 0}' | post /end
