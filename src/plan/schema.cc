// The one source of docs/plan.schema.json: `weft plan schema > docs/plan.schema.json` writes it
// anew, and a test refuses a document that differs.

#include "weft/plan.h"

namespace weft::plan {

std::string schema() {
  return R"schema({
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "$id": "urn:weft:plan:1",
  "title": "weft plan, format version 1",
  "description": "What to do with gradients: docs/plan_format.md. This schema checks the shape of a plan. Ranges of sizes that are written as text, lengths in bytes, and rules between fields are checked by weft plan check.",
  "type": "object",
  "required": ["weft_plan"],
  "additionalProperties": false,
  "properties": {
    "weft_plan": {
      "description": "Version of the format.",
      "const": 1
    },
    "name": {
      "description": "For people; not part of the hash.",
      "$ref": "#/$defs/name",
      "maxLength": 256,
      "default": "unnamed"
    },
    "comment": {
      "description": "For people; not part of the hash.",
      "type": "string",
      "maxLength": 65536,
      "default": ""
    },
    "bucket_rule": {
      "description": "How tensors that no entry of buckets names are grouped, in the order in which backward makes them.",
      "type": "object",
      "additionalProperties": false,
      "properties": {
        "first": {
          "description": "Limit of the first bucket.",
          "$ref": "#/$defs/size",
          "default": "1MiB"
        },
        "size": {
          "description": "Limit of all other buckets.",
          "$ref": "#/$defs/size",
          "default": "25MiB"
        },
        "may_exceed": {
          "description": "Whether the tensor that crosses the limit still goes into the bucket.",
          "type": "boolean",
          "default": true
        }
      }
    },
    "buckets": {
      "description": "Groups by name. A tensor may be in one of them only.",
      "type": "array",
      "default": [],
      "items": {
        "type": "object",
        "required": ["tensors"],
        "additionalProperties": false,
        "properties": {
          "tensors": {
            "description": "Names, in the order in which they lie in the bucket.",
            "type": "array",
            "minItems": 1,
            "uniqueItems": true,
            "items": { "$ref": "#/$defs/tensor" }
          },
          "priority": {
            "description": "Smaller is more urgent; without it, the bucket is ranked by priority and order.",
            "$ref": "#/$defs/priority"
          },
          "codec": {
            "description": "Without it, the codec of the plan.",
            "$ref": "#/$defs/codec"
          }
        }
      }
    },
    "partition": {
      "description": "A bucket is sent in pieces of at most this size; null: whole.",
      "anyOf": [
        { "$ref": "#/$defs/size_text" },
        { "type": "integer", "minimum": 4096, "maximum": 1099511627776 },
        { "type": "null" }
      ],
      "default": null
    },
    "order": {
      "description": "Which piece goes first: the first that is ready, or the one whose layer forward needs first.",
      "enum": ["ready", "layer"],
      "default": "ready"
    },
    "priority": {
      "description": "Urgency by tensor name; smaller is more urgent. A bucket takes that of its most urgent tensor.",
      "type": "object",
      "propertyNames": { "$ref": "#/$defs/tensor" },
      "additionalProperties": { "$ref": "#/$defs/priority" },
      "default": {}
    },
    "credit": {
      "description": "Bytes that may be in flight at a time; null: no limit.",
      "anyOf": [{ "$ref": "#/$defs/size" }, { "type": "null" }],
      "default": null
    },
    "barrier": {
      "description": "What the next step waits for: every gradient, or layer by layer those it needs.",
      "enum": ["all", "tensor"],
      "default": "all"
    },
    "algorithm": {
      "description": "The first rule whose up_to is not smaller than the piece applies. up_to grows from rule to rule; the last rule, and no other, has none.",
      "type": "array",
      "minItems": 1,
      "default": [{ "use": "ring" }],
      "items": {
        "type": "object",
        "required": ["use"],
        "additionalProperties": false,
        "properties": {
          "up_to": { "$ref": "#/$defs/size" },
          "use": { "enum": ["ring", "halving_doubling", "tree", "hierarchical", "doubling", "direct", "auto"] }
        }
      }
    },
    "lanes": {
      "description": "Connections between two neighbours.",
      "type": "integer",
      "minimum": 1,
      "maximum": 64,
      "default": 1
    },
    "chunk": {
      "description": "Bytes that go to a lane at a time, from 4KiB to 64MiB.",
      "anyOf": [
        { "$ref": "#/$defs/size_text" },
        { "type": "integer", "minimum": 4096, "maximum": 67108864 }
      ],
      "default": "256KiB"
    },
    "lane_worker": {
      "description": "Who serves the lanes: threads of the training process, or processes beside it.",
      "enum": ["thread", "process"],
      "default": "thread"
    },
    "lane_workers": {
      "description": "How many of them; not more than lanes.",
      "type": "integer",
      "minimum": 1,
      "maximum": 64,
      "default": 1
    },
    "codec": {
      "description": "For every bucket that does not say its own.",
      "$ref": "#/$defs/codec",
      "default": "none"
    },
    "sync": {
      "description": "How replicas keep step.",
      "type": "object",
      "additionalProperties": false,
      "properties": {
        "mode": {
          "enum": ["synchronous", "asynchronous", "bounded_stale", "local_sgd", "one_step_delay"],
          "default": "synchronous"
        },
        "staleness": {
          "description": "bounded_stale: steps that the fastest may lead; local_sgd: local steps between two exchanges; otherwise 0.",
          "type": "integer",
          "minimum": 0,
          "maximum": 1000000,
          "default": 0
        }
      },
      "allOf": [
        {
          "if": { "required": ["mode"], "properties": { "mode": { "const": "local_sgd" } } },
          "then": { "required": ["staleness"], "properties": { "staleness": { "minimum": 1 } } }
        },
        {
          "if": {
            "not": {
              "required": ["mode"],
              "properties": { "mode": { "enum": ["bounded_stale", "local_sgd"] } }
            }
          },
          "then": { "properties": { "staleness": { "const": 0 } } }
        }
      ]
    }
  },
  "$defs": {
    "size_text": {
      "description": "A number and a unit: 1KiB is 1024 bytes, 1kB is 1000.",
      "type": "string",
      "pattern": "^[0-9]+\\.?[0-9]*(B|KiB|MiB|GiB|kB|KB|MB|GB)?$"
    },
    "size": {
      "description": "From 1B to 1024GiB, as text or as a number of bytes.",
      "anyOf": [
        { "$ref": "#/$defs/size_text" },
        { "type": "integer", "minimum": 1, "maximum": 1099511627776 }
      ]
    },
    "name": {
      "type": "string",
      "minLength": 1,
      "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"
    },
    "tensor": {
      "description": "The name of a tensor, as the framework has it.",
      "$ref": "#/$defs/name",
      "maxLength": 1024
    },
    "priority": {
      "type": "integer",
      "minimum": -1000000000,
      "maximum": 1000000000
    },
    "codec": {
      "enum": ["none", "fp16", "bf16", "one_bit", "qsgd", "terngrad", "top_k", "dgc", "power_sgd"]
    }
  }
}
)schema";
}

}  // namespace weft::plan
