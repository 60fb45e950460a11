// Show a picture large, with a slider over steps, before and after, zoom and keys. Without this script, a picture
// is a link to its file.
"use strict";

const ZOOMS = ["fit", 1, 2, 4, 8];
let viewer = null;

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// The pictures of each column, such as a prompt, in the order of their rows, such as steps; titles may repeat.
function columnsOf(group) {
  const columns = new Map();
  for (const link of group.querySelectorAll("a[data-column]")) {
    const name = link.dataset.column;
    const { row, title } = link.dataset;
    columns.set(name, [...(columns.get(name) ?? []), { row, title, address: link.href }]);
  }
  return columns;
}

class Viewer {
  constructor() {
    this.title = element("p", { dir: "auto" });
    this.before = element("img", { alt: "" });
    this.picture = element("img", { alt: "" });
    this.stage = element("div", { className: "stage fit", tabIndex: 0, role: "region", ariaLabel: "Picture" },
      this.before, this.picture);
    this.slider = element("input", { type: "range", min: 0, value: 0 });
    this.step = element("output", {});
    this.compared = element("input", { type: "checkbox" });
    this.wipe = element("input", { type: "range", min: 0, max: 100, value: 50 });
    this.zoom = element("select", {}, ...ZOOMS.map((zoom, index) =>
      element("option", { value: index, textContent: zoom === "fit" ? "fit" : `${zoom * 100}%` })));
    const close = element("button", { textContent: "Close" });
    this.steps = element("label", {}, "Step ", this.slider, this.step);
    this.comparison = element("label", {}, this.compared, " Before and after");
    this.wiping = element("label", {}, "Divider ", this.wipe);
    this.help = element("span", { className: "quiet",
      textContent: "Keys: left and right step, up and down prompt, b before and after, + and - zoom, Esc closes." });
    this.dialog = element("dialog", { className: "viewer", ariaLabel: "Large picture" },
      element("div", { className: "bar" }, this.steps, this.comparison, this.wiping,
        element("label", {}, "Zoom ", this.zoom), close),
      this.title, this.stage, this.help);
    document.body.append(this.dialog);
    close.addEventListener("click", () => this.dialog.close());
    for (const input of [this.slider, this.compared, this.wipe, this.zoom]) {
      input.addEventListener("input", () => this.show());
    }
    this.picture.addEventListener("load", () => this.resize());
    this.dialog.addEventListener("keydown", event => this.press(event));
  }

  open(group, link) {
    this.group = group;
    this.column = link.dataset.column;
    this.shown = columnsOf(group);
    this.slider.value = 0;
    const pictures = this.shown.get(this.column);
    this.slider.max = pictures.length - 1;
    this.slider.value = Math.max(0, pictures.findIndex(each => each.address === link.href));
    this.zoom.value = 0;
    this.dialog.showModal();
    this.show();
    this.stage.focus();
  }

  show() {
    // A training adds pictures while the dialog is open.
    if (!this.group.isConnected) this.group = document.getElementById(this.group.id) ?? this.group;
    this.shown = columnsOf(this.group);
    const pictures = this.shown.get(this.column) ?? [];
    if (pictures.length === 0) return;
    this.slider.max = pictures.length - 1;
    const current = pictures[Number(this.slider.value)];
    const several = pictures.length > 1;
    this.steps.hidden = this.comparison.hidden = !several;
    const compares = several && this.compared.checked;
    this.wiping.hidden = this.before.hidden = !compares;
    this.step.textContent = current.row;
    this.title.textContent = current.title;
    if (this.picture.src !== current.address) this.picture.src = current.address;
    this.picture.alt = [current.row, current.title].filter(Boolean).join(": ");
    if (compares) {
      this.before.src = pictures[0].address;
      this.before.alt = `${pictures[0].row}: ${current.title}`;
      this.title.textContent = `${current.title} (left ${pictures[0].row}, right ${current.row})`;
    }
    this.resize();
  }

  resize() {
    const zoom = ZOOMS[Number(this.zoom.value)];
    this.stage.classList.toggle("fit", zoom === "fit");
    this.stage.classList.toggle("pixels", this.picture.naturalWidth <= 256);
    for (const image of [this.before, this.picture]) {
      image.style.width = zoom === "fit" ? "" : `${this.picture.naturalWidth * zoom}px`;
    }
    const compares = !this.before.hidden;
    // Of a picture that fits the window, the box is wider than the picture.
    const box = this.picture.clientWidth, height = this.picture.clientHeight;
    const scale = Math.min(box / this.picture.naturalWidth, height / this.picture.naturalHeight) || 1;
    const width = zoom === "fit" ? this.picture.naturalWidth * scale : box;
    const left = (box - width) / 2 + width * this.wipe.value / 100;
    this.picture.style.clipPath = compares ? `inset(0 0 0 ${left}px)` : "";
    this.before.style.clipPath = compares ? `inset(0 ${box - left}px 0 0)` : "";
  }

  press(event) {
    const typing = event.target.matches("input[type=range], select");
    const names = [...this.shown.keys()];
    const moves = { ArrowLeft: -1, ArrowRight: 1 }, columns = { ArrowUp: -1, ArrowDown: 1 };
    const zooms = { "+": 1, "=": 1, "-": -1 };
    if (event.key in moves && !typing) {
      this.slider.value = Number(this.slider.value) + moves[event.key];
    } else if (event.key in columns && !typing && names.length > 1) {
      const index = names.indexOf(this.column) + columns[event.key];
      this.column = names[(index + names.length) % names.length];
    } else if (event.key in zooms) {
      this.zoom.value = Math.min(ZOOMS.length - 1, Math.max(0, Number(this.zoom.value) + zooms[event.key]));
    } else if (event.key === "b") {
      this.compared.checked = !this.compared.checked;
    } else {
      return;
    }
    event.preventDefault();
    this.show();
  }
}

document.addEventListener("click", event => {
  const link = event.target.closest?.("[data-viewer] a[data-column]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  viewer ??= new Viewer();
  viewer.open(link.closest("[data-viewer]"), link);
});
