import { h } from "vue";

const FORMS = {
  full: { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" },
  short: { month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" },
};

// "2026-03-02 12:02:22" in the time zone of the browser; the server wrote it in UTC, which stays as the title.
function local(at, form) {
  const date = new Date(at);
  if (isNaN(date)) return null;
  const part = Object.fromEntries(
    new Intl.DateTimeFormat("en-GB", { ...FORMS[form], hourCycle: "h23" }).formatToParts(date).map((p) => [p.type, p.value])
  );
  const day = [part.year, part.month, part.day].filter(Boolean).join("-");
  return `${day} ${[part.hour, part.minute, part.second].filter(Boolean).join(":")}`;
}

// Text becomes text nodes, attributes come from the names that markup.py permits: nothing is parsed as HTML.
function draw(node, emit) {
  if (typeof node === "string") return node;
  const [tag, attributes, ...children] = node;
  const written = tag === "time" ? local(attributes.datetime, attributes["data-form"] || "full") : null;
  if (written !== null) return h(tag, { ...attributes, title: children[0] }, [written]);
  if (tag === "input") {
    // A checkbox; which one it is was written by the server.
    const onChange = (event) => emit("pick", { id: attributes["data-pick"], on: event.target.checked });
    return h(tag, { ...attributes, checked: !!attributes.checked, onChange });
  }
  return h(tag, attributes, children.map((child) => draw(child, emit)));
}

export default {
  props: { tree: Array },
  emits: ["pick"],
  render() {
    return h("div", { class: "tree" }, (this.tree || []).map((node) => draw(node, (name, what) => this.$emit(name, what))));
  },
};
