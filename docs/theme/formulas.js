// Formulas arrive as \( … \) and \[ … \]; KaTeX sets them.
document.addEventListener("DOMContentLoaded", () =>
  renderMathInElement(document.body, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
    strict: false,
  }),
);
