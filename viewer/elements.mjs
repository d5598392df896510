// What builds elements, for every module.
export { Fragment, h } from "preact";
