/* Fields of the spec's JSON schema, as a form shows them. */

export interface Schema {
  $ref?: string; $defs?: Record<string, Schema>; type?: string; properties?: Record<string, Schema>; required?: string[];
  anyOf?: Schema[]; enum?: unknown[]; const?: unknown; items?: Schema; description?: string; default?: unknown; examples?: unknown[];
  minimum?: number; maximum?: number; exclusiveMinimum?: number; exclusiveMaximum?: number; additionalProperties?: boolean | Schema;
}
export type Kind = "section" | "switch" | "choice" | "number" | "integer" | "text" | "list" | "json";
export interface Field {
  path: string; name: string; kind: Kind; description: string; required: boolean; nullable: boolean;
  choices: unknown[]; least?: number; most?: number; initial: unknown; example: unknown; fields: Field[];
}
export type Tree = Record<string, unknown>;

export function fieldsOf(root: Schema, of: Schema = root, path = ""): Field[] {
  return Object.entries(of.properties ?? {}).map(([name, schema]) => fieldOf(root, name, schema, path ? `${path}.${name}` : name, of.required?.includes(name) ?? false));
}

function fieldOf(root: Schema, name: string, given: Schema, path: string, required: boolean): Field {
  const options = (given.anyOf ?? [given]).map(each => resolved(root, each));
  const some = options.filter(each => each.type !== "null"), nullable = some.length < options.length;
  const schema = { ...some[0], ...(given.anyOf ? {} : resolved(root, given)) };
  const kind: Kind = some.length > 1 ? "json" : kindOf(schema);
  return {
    path, name, kind, required, nullable, description: given.description ?? schema.description ?? "", choices: schema.enum ?? [],
    least: schema.minimum ?? schema.exclusiveMinimum, most: schema.maximum ?? schema.exclusiveMaximum,
    initial: given.default, example: given.examples?.[0], fields: kind === "section" ? fieldsOf(root, schema, path) : [],
  };
}

function resolved(root: Schema, schema: Schema): Schema {
  if (!schema.$ref) return schema;
  const named = root.$defs?.[schema.$ref.split("/").pop()!] ?? {};
  return { ...named, ...Object.fromEntries(Object.entries(schema).filter(([key]) => key !== "$ref")) };
}

function kindOf(schema: Schema): Kind {
  if (schema.enum) return "choice";
  if (schema.properties) return "section";
  if (schema.type === "boolean") return "switch";
  if (schema.type === "integer") return "integer";
  if (schema.type === "number") return "number";
  if (schema.type === "string") return "text";
  return schema.type === "array" && schema.items?.type === "string" ? "list" : "json";
}

export function valueAt(tree: Tree, path: string): unknown {
  return path.split(".").reduce<unknown>((at, name) => (at && typeof at === "object" ? (at as Tree)[name] : undefined), tree);
}

/* The tree with another value at a path; undefined removes it, and sections that become empty. */
export function withValue(tree: Tree, path: string, value: unknown): Tree {
  const [name, ...rest] = path.split(".");
  const inner = rest.length ? withValue((tree[name] as Tree | undefined) ?? {}, rest.join("."), value) : value;
  const { [name]: _, ...others } = tree;
  const empty = inner === undefined || (rest.length > 0 && Object.keys(inner as Tree).length === 0);
  return empty ? others : { ...others, [name]: inner };
}
